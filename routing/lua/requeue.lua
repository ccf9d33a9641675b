-- Gives a request another attempt on another replica of its stage: that of its affinity key, else the one
-- with the shortest queue (least_work: with the earliest finish). With no other one ready it stays in the
-- queue of its own. ARGV: id, attempt, owner ('' = only while queued), now, blame ('crash': it was running
-- in one; 'death': the same, if its process is gone, as whoever asks believes; 'suspect': it may have caused
-- one, and runs alone from now on; 'none'), most crashes, policy,
-- until when its affinity key holds it.
-- A crash in which several ran is everybody's, and so ends nobody: who was in one runs alone from then on,
-- and may be ended by the next. Those that are moved one by one must not look alone for that: the first
-- tells the rest.
-- Returns {'queued', replica, attempt} | {'ended'} | {'stale'}.
local id, attempt, owner, now = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local blame, most, policy = ARGV[5], tonumber(ARGV[6]), ARGV[7]
local status, now_attempt, now_owner, replica, stage, cancel, affinity, work, crashed_beside = get(key.request(id),
  field.status, field.attempt, field.owner, field.replica, field.stage, field.cancel, field.affinity_key,
  field.work, field.crashed_beside)
if now_attempt ~= attempt then return {'stale'} end
if owner == '' and status ~= 'queued' then return {'stale'} end
if owner ~= '' and (status ~= 'running' or now_owner ~= owner) then return {'stale'} end
if blame == 'death' then
  -- What was read of the replica may be older than the claim: it may have been started again meanwhile.
  local newest, state = get(key.replica(replica), field.incarnation, field.state)
  local lives = state == 'ready' or state == 'draining' or state == 'loading'
  local expires_at = tonumber(redis.call('ZSCORE', key.replicas, replica) or '0')
  if newest == owner and lives and expires_at > tonumber(now) then return {'stale'} end
  blame = 'crash'
end

local others_ran = false
if blame == 'crash' then
  others_ran = crashed_beside == owner
  for _, other in ipairs(redis.call('SMEMBERS', key.running(replica))) do
    if other ~= id and redis.call('HGET', key.request(other), field.owner) == owner then
      redis.call('HSET', key.request(other), field.crashed_beside, owner)
      others_ran = true
    end
  end
end
if cancel == '1' then
  finish(id, 'canceled', now)
  return {'ended'}
end
if blame == 'suspect' then redis.call('HSET', key.request(id), field.suspect, '1') end
if blame == 'crash' then
  local crashes = redis.call('HINCRBY', key.request(id), field.crashes, 1)
  if crashes >= most and not others_ran then
    redis.call('HINCRBY', key.totals(replica), field.failed, 1)
    finish(id, 'failed', now, field.error, failure('replica_crashed',
      'The replica crashed while it ran this request, ' .. crashes .. (crashes == 1 and ' time' or ' times') ..
      '; it is not tried again.', false))
    return {'ended'}
  end
end

local others = {}
for _, name in ipairs(rotation(stage, now)) do
  if name ~= replica then table.insert(others, name) end
end
if #others == 0 and status == 'queued' then return {'stale'} end
local target = replica
if #others > 0 and affinity and affinity ~= '' then
  target = by_affinity(others, affinity)
elseif #others > 0 and policy == 'least_work' then
  target = earliest_finish(others, tonumber(work))
elseif #others > 0 then
  target = shortest_queue(others)
end
dequeue(id, replica)
redis.call('SREM', key.running(replica), id)
redis.call('DEL', key.preview(id))
local next_attempt = redis.call('HINCRBY', key.request(id), field.attempt, 1)
redis.call('HSET', key.request(id), field.owner, '', field.started_at, '', field.step, '0', field.steps, '0',
  field.held_until, affinity and affinity ~= '' and ARGV[8] or '')
set_status(id, 'queued')
enqueue(id, target)
announce('queued', id, 'queued', next_attempt, 'replica', target)
return {'queued', target, tostring(next_attempt)}
