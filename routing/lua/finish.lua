-- Records the outcome of a claimed request. ARGV: id, attempt, incarnation, now, status, then further
-- name, value pairs. Returns 1, or 0 where the claim no longer holds: the outcome then counts for
-- nothing and its files are the caller's to remove. Sent again because its answer got lost, the same
-- outcome of the same claim is 1 again: its files are those of the record. One that was told to stop is
-- canceled, however far it came before it heard of that: a cancel holds once it is answered.
local id, attempt, owner, now, status = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local record = records.get(id, 'status', 'attempt', 'owner', 'replica', 'hidden', 'cancel', 'work')
if record.attempt ~= attempt or record.owner ~= owner then return 0 end
if record.status == status then return 1 end
if record.status ~= 'running' then return 0 end
local too_late = record.cancel == '1' and status ~= 'canceled'
if not too_late and #ARGV > 5 then records.set(id, unpack(ARGV, 6)) end
local work = tonumber(record.work or '0')
count_work(record.replica, status == 'succeeded' and work or work - work_left(id), now)
if too_late then
  finish(id, 'canceled', now)
  return 0
end
finish(id, status, now)
if status == 'succeeded' then totals.add(record.replica, 'completed', 1) end
if status == 'failed' then totals.add(record.replica, 'failed', 1) end
if record.hidden == '1' then return 0 end
return 1
