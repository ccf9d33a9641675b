-- Changes a record that still stands at the revision the caller read. ARGV: id, revision, status it must
-- be in, score ('' = keep its place in the queue), then name, value pairs.
-- Returns {'edited', replica, attempt} | {'stale'} | {'unknown'}.
local id, revision, status, score = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local record = records.get(id, 'status', 'revision', 'replica', 'attempt', 'hidden')
if not record.status or record.hidden == '1' then return {'unknown'} end
if record.status ~= status or record.revision ~= revision then return {'stale'} end
-- Its place in the queue, its share of the work there and its lists may all change.
leave_lists(id)
if status == 'queued' then dequeue(id, record.replica) end
records.set(id, unpack(ARGV, 5))
records.add(id, 'revision', 1)
if score ~= '' then records.set(id, 'score', score) end
if status == 'queued' then enqueue(id, record.replica) end
enter_lists(id)
watch_deadline(id)
announce('edited', id, status, record.attempt)
return {'edited', record.replica, record.attempt}
