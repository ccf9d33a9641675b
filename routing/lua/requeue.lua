-- Gives a request another attempt on another replica of its stage: that of its affinity key, else the one
-- with the fewest waiting (least_work: that would end it the soonest). With no other one ready it stays in
-- the line of its own. ARGV: id, attempt, owner ('' = only while queued), now, blame ('crash': it was
-- running in one; 'suspect': it may have caused one, and runs alone from now on; 'none'), most crashes,
-- policy.
-- A crash in company is everybody's, and so ends nobody: who was in one runs alone from then on, and may be
-- ended by the next. Those that are moved one by one must not look alone for that: the first tells the rest.
-- Returns {'queued', replica, attempt} | {'ended'} | {'stale'}.
local id, attempt, owner, now = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local blame, most, policy = ARGV[5], tonumber(ARGV[6]), ARGV[7]
local key = request_key(id)
local record = redis.call('HMGET', key, 'status', 'attempt', 'owner', 'replica', 'stage', 'cancel',
  'affinity_key', 'work')
local status, replica, affinity = record[1], record[4], record[7]
if record[2] ~= attempt then return {'stale'} end
if owner == '' and status ~= 'queued' then return {'stale'} end
if owner ~= '' and (status ~= 'running' or record[3] ~= owner) then return {'stale'} end

local in_company = false
if blame == 'crash' then
  in_company = redis.call('HGET', key, 'crashed_beside') == owner
  for _, other in ipairs(redis.call('SMEMBERS', running_key(replica))) do
    if other ~= id and redis.call('HGET', request_key(other), 'owner') == owner then
      redis.call('HSET', request_key(other), 'crashed_beside', owner)
      in_company = true
    end
  end
end
if record[6] == '1' then
  finish(id, 'canceled', now, {})
  return {'ended'}
end
if blame == 'suspect' then redis.call('HSET', key, 'suspect', '1') end
if blame == 'crash' then
  local crashes = redis.call('HINCRBY', key, 'crashes', 1)
  if crashes >= most and not in_company then
    redis.call('HINCRBY', totals_key(replica), 'failed', 1)
    finish(id, 'failed', now, {'error', failure('replica_crashed',
      'The replica died while it ran this request, ' .. crashes .. (crashes == 1 and ' time' or ' times') ..
      '; it is not tried again.', false)})
    return {'ended'}
  end
end

local others = {}
for _, name in ipairs(rotation(record[5], now)) do
  if name ~= replica then table.insert(others, name) end
end
if #others == 0 and status == 'queued' then return {'stale'} end
local target = replica
if #others > 0 and affinity ~= '' then
  target = kindred(others, affinity)
elseif #others > 0 and policy == 'least_work' then
  target = soonest(others, tonumber(record[8]))
elseif #others > 0 then
  target = least(others, function(name) return redis.call('ZCARD', waiting_key(name)) end)
end
dequeue(id, replica)
redis.call('SREM', running_key(replica), id)
redis.call('DEL', preview_key(id))
local next_attempt = redis.call('HINCRBY', key, 'attempt', 1)
redis.call('HSET', key, 'owner', '', 'started_at', '', 'step', '0', 'steps', '0')
set_status(id, 'queued')
enqueue(id, target)
announce('queued', id, 'queued', next_attempt, 'replica', target)
return {'queued', target, tostring(next_attempt)}
