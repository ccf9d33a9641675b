-- Accepts a request: looks the idempotency key up, chooses a replica of the stage, writes the record.
-- ARGV: id, stage, now, model, policy, affinity key, most waiting for a replica, for a stage, idempotency
-- key, fingerprint, score, work, then the record's further name, value pairs.
-- Returns {'created' or 'exists', the record's pairs, its place in line from 0, messages in the replica's
-- queue, requests in its line} | {'mismatch', id} | {'no_replica'} | {'replica_full' or 'stage_full',
-- seconds until there is room or ''}.
local id, stage, now, model, policy, affinity = unpack(ARGV, 1, 6)
local most, most_of_stage, key, fingerprint, score, work = unpack(ARGV, 7, 12)

local function answer(word, request_id)
  local replica = redis.call('HGET', request_key(request_id), 'replica')
  return {word, redis.call('HGETALL', request_key(request_id)),
    redis.call('ZRANK', waiting_key(replica), request_id),
    redis.call('LLEN', prefix .. replica), redis.call('ZCARD', waiting_key(replica))}
end

-- Sent again because its answer got lost: it is recorded already.
if redis.call('EXISTS', request_key(id)) == 1 then return answer('created', id) end
if key ~= '' then
  local known = redis.call('GET', idempotency_key(key))
  if known then
    local known_fingerprint, known_id = string.match(known, '^(%S+) (%S+)$')
    if known_fingerprint ~= fingerprint then return {'mismatch', known_id} end
    return answer('exists', known_id)
  end
end

local function full(word, names)
  local seconds = seconds_to_room(names)
  return {word, seconds and string.format('%.17g', seconds) or ''}
end

local names = rotation(stage, now)
if #names == 0 then return {'no_replica'} end
if redis.call('ZCARD', listed_key('queued', model)) >= tonumber(most_of_stage) then
  return full('stage_full', names)
end
local turn = affinity == '' and redis.call('INCR', prefix .. 'stage:' .. stage .. ':turn') or 1
local open = {}
for offset = 0, #names - 1 do
  local name = names[(turn - 1 + offset) % #names + 1]
  if redis.call('ZCARD', waiting_key(name)) < tonumber(most) then table.insert(open, name) end
end
if #open == 0 then return full('replica_full', names) end
local replica = open[1]
if affinity ~= '' then
  replica = kindred(open, affinity)
elseif policy == 'least_work' then
  replica = soonest(open, tonumber(work))
end

redis.call('HSET', request_key(id), 'id', id, 'stage', stage, 'model', model, 'attempt', '1',
  'crashes', '0', 'revision', '0', 'score', score, 'work', work, 'created_at', now,
  'affinity_key', affinity, 'idempotency_key', key, unpack(ARGV, 13))
redis.call('ZREM', prefix .. 'loose', id)
set_status(id, 'queued')
enqueue(id, replica)
if key ~= '' then redis.call('SET', idempotency_key(key), fingerprint .. ' ' .. id) end
watch_deadline(id)
announce('queued', id, 'queued', 1, 'replica', replica)
return answer('created', id)
