-- Accepts a request: looks the idempotency key up, takes the next ready replica of the stage in turn,
-- writes the record. ARGV: id, stage, now, score, most waiting, idempotency key, fingerprint,
-- then the record's name, value pairs.
-- Returns {'created', replica} | {'exists', id} | {'mismatch', id} | {'no_replica'} | {'full'}.
local id, stage, now, score = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local most, key, fingerprint = tonumber(ARGV[5]), ARGV[6], ARGV[7]

if key ~= '' then
  local known = redis.call('GET', prefix .. 'idempotency:' .. key)
  if known then
    local known_fingerprint, known_id = string.match(known, '^(%S+) (%S+)$')
    if known_fingerprint ~= fingerprint then return {'mismatch', known_id} end
    return {'exists', known_id}
  end
end

local names = rotation(stage, now)
if #names == 0 then return {'no_replica'} end
local turn = redis.call('INCR', prefix .. 'stage:' .. stage .. ':turn')
local replica = nil
for offset = 0, #names - 1 do
  local name = names[(turn - 1 + offset) % #names + 1]
  if redis.call('ZCARD', waiting_key(name)) < most then
    replica = name
    break
  end
end
if not replica then return {'full'} end

redis.call('HSET', request_key(id), 'id', id, 'stage', stage, 'status', 'queued', 'replica', replica,
  'attempt', '1', 'crashes', '0', 'revision', '0', 'score', score, 'created_at', now,
  'idempotency_key', key, unpack(ARGV, 8))
redis.call('ZADD', prefix .. 'requests', now, id)
redis.call('ZADD', waiting_key(replica), score, id)
if key ~= '' then redis.call('SET', prefix .. 'idempotency:' .. key, fingerprint .. ' ' .. id) end
watch_deadline(id)
announce('queued', id, 'queued', 1, 'replica', replica)
return {'created', replica}
