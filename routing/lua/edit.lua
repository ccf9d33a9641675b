-- Changes a record that still stands at the revision the caller read. ARGV: id, revision, status it must
-- be in, score ('' = keep its place in the queue), then name, value pairs.
-- Returns {'edited', replica, attempt} | {'stale'} | {'unknown'}.
local id, revision, status, score = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now_status, now_revision, replica, attempt, hidden = get(key.request(id),
  field.status, field.revision, field.replica, field.attempt, field.hidden)
if not now_status or hidden == '1' then return {'unknown'} end
if now_status ~= status or now_revision ~= revision then return {'stale'} end
-- Its place in the queue, its share of the work there and its lists may all change.
leave_lists(id)
if status == 'queued' then dequeue(id, replica) end
redis.call('HSET', key.request(id), unpack(ARGV, 5))
redis.call('HINCRBY', key.request(id), field.revision, 1)
if score ~= '' then redis.call('HSET', key.request(id), field.score, score) end
if status == 'queued' then enqueue(id, replica) end
enter_lists(id)
watch_deadline(id)
announce('edited', id, status, attempt)
return {'edited', replica, attempt}
