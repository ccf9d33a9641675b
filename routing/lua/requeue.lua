-- Gives a request another attempt, on the replica of its stage with the fewest waiting ones; with no
-- other one ready it stays in the line of its own. ARGV: id, attempt, owner ('' = only while queued),
-- now, blame ('crash': it was running in one; 'suspect': it may have caused one, and runs alone from
-- now on; 'none'), most crashes.
-- Returns {'queued', replica, attempt} | {'ended'} | {'stale'}.
local id, attempt, owner, now = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local blame, most = ARGV[5], tonumber(ARGV[6])
local key = request_key(id)
local record = redis.call('HMGET', key, 'status', 'attempt', 'owner', 'replica', 'stage', 'cancel',
  'score', 'crashes')
local status, replica = record[1], record[4]
if record[2] ~= attempt then return {'stale'} end
if owner == '' and status ~= 'queued' then return {'stale'} end
if owner ~= '' and (status ~= 'running' or record[3] ~= owner) then return {'stale'} end

if record[6] == '1' then
  finish(id, 'canceled', now, {})
  return {'ended'}
end
if blame == 'suspect' then redis.call('HSET', key, 'suspect', '1') end
if blame == 'crash' then
  local crashes = redis.call('HINCRBY', key, 'crashes', 1)
  if crashes >= most then
    redis.call('HINCRBY', totals_key(replica), 'failed', 1)
    finish(id, 'failed', now, {'error', failure('replica_crashed',
      'The replica died ' .. crashes .. ' times while it ran this request; it is not tried again.', false)})
    return {'ended'}
  end
end

local target, fewest = nil, nil
for _, name in ipairs(rotation(record[5], now)) do
  local waiting = redis.call('ZCARD', waiting_key(name))
  if name ~= replica and (not fewest or waiting < fewest) then target, fewest = name, waiting end
end
if not target then
  if status == 'queued' then return {'stale'} end
  target = replica
end
redis.call('ZREM', waiting_key(replica), id)
redis.call('SREM', running_key(replica), id)
redis.call('DEL', preview_key(id))
local next_attempt = redis.call('HINCRBY', key, 'attempt', 1)
redis.call('HSET', key, 'status', 'queued', 'replica', target, 'owner', '', 'started_at', '',
  'step', '0', 'steps', '0')
redis.call('ZADD', waiting_key(target), record[7], id)
announce('queued', id, 'queued', next_attempt, 'replica', target)
return {'queued', target, tostring(next_attempt)}
