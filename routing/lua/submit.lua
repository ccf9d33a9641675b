-- Accepts a request: looks the idempotency key up, chooses a replica of the stage, writes the record.
-- ARGV: id, stage, now, model, policy, affinity key, most waiting for a replica, for a stage, idempotency
-- key, fingerprint, score, work, client, seconds that a client's requests may be put back at most, then the
-- record's further name, value pairs.
-- Returns {'created' or 'exists', the record's pairs, its place in the queue from 0, messages in Celery's
-- queue, requests in the replica's} | {'mismatch', id} | {'no_replica'} | {'replica_full' or 'stage_full',
-- seconds until there is room or ''}.
local id, stage, now, model, policy, affinity = unpack(ARGV, 1, 6)
local most, most_of_stage, client_key, fingerprint, score, work, client, put_back = unpack(ARGV, 7, 14)

local function answer(word, request_id)
  local replica = redis.call('HGET', key.request(request_id), field.replica)
  return {word, redis.call('HGETALL', key.request(request_id)),
    redis.call('ZRANK', key.waiting(replica), request_id),
    redis.call('LLEN', key.queue(replica)), redis.call('ZCARD', key.waiting(replica))}
end

-- Sent again because its answer got lost: it is recorded already.
if redis.call('EXISTS', key.request(id)) == 1 then return answer('created', id) end
if client_key ~= '' then
  local known = redis.call('GET', key.idempotency(client_key))
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
if redis.call('ZCARD', key.by_status_and_model('queued', model)) >= tonumber(most_of_stage) then
  return full('stage_full', names)
end
local turn = affinity == '' and redis.call('INCR', key.turn(stage)) or 1
local open = {}
for offset = 0, #names - 1 do
  local name = names[(turn - 1 + offset) % #names + 1]
  if redis.call('ZCARD', key.waiting(name)) < tonumber(most) then table.insert(open, name) end
end
if #open == 0 then return full('replica_full', names) end
local replica
if affinity ~= '' then
  replica = by_affinity(open, affinity)
elseif policy == 'least_work' then
  replica = earliest_finish(open, tonumber(work))
else
  replica = most_idle(open)
end

local counted_at, client_s = in_turn(stage, client, tonumber(work), now, names, tonumber(put_back))
if counted_at ~= now then score = string.format('%.17g', tonumber(score) + counted_at - now) end

redis.call('HSET', key.request(id), field.id, id, field.status, 'queued', field.stage, stage, field.model, model,
  field.attempt, '1', field.crashes, '0', field.revision, '0', field.score, score, field.work, work,
  field.created_at, now, field.affinity_key, affinity, field.idempotency_key, client_key, field.client, client,
  field.client_s, client_s, field.counted_at, string.format('%.17g', counted_at), unpack(ARGV, 15))
redis.call('ZREM', key.orphaned, id)
enter_lists(id)
enqueue(id, replica)
if client_key ~= '' then redis.call('SET', key.idempotency(client_key), fingerprint .. ' ' .. id) end
watch_deadline(id)
announce('queued', id, 'queued', 1, 'replica', replica)
return answer('created', id)
