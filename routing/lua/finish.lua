-- Records the outcome of a claimed request. ARGV: id, attempt, incarnation, now, status, then further
-- name, value pairs. Returns 1 (2: and requests wait for other replicas, none for this one), or 0 where the claim no longer holds: the outcome then counts for
-- nothing and its files are the caller's to remove. Sent again because its answer got lost, the same
-- outcome of the same claim is 1 again: its files are those of the record. One that was told to stop is
-- canceled, however far it came before it heard of that: a cancel holds once it is answered.
local id, attempt, owner, now, status = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local now_status, now_attempt, now_owner, replica, hidden, cancel, work, stage = get(key.request(id),
  field.status, field.attempt, field.owner, field.replica, field.hidden, field.cancel, field.work, field.stage)
if now_attempt ~= attempt or now_owner ~= owner then return 0 end
if now_status == status then return 1 end
if now_status ~= 'running' then return 0 end
local too_late = cancel == '1' and status ~= 'canceled'
if not too_late then redis.call('HSET', key.request(id), unpack(ARGV, 6)) end
work = tonumber(work or '0')
count_work(replica, status == 'succeeded' and work or work - work_left(id), now)
if too_late then
  finish(id, 'canceled', now)
  return 0
end
finish(id, status, now)
if status == 'succeeded' then redis.call('HINCRBY', key.totals(replica), field.completed, 1) end
if status == 'failed' then redis.call('HINCRBY', key.totals(replica), field.failed, 1) end
if hidden == '1' then return 0 end
return others_wait(stage, replica) and 2 or 1
