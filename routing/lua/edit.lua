-- Changes a record that still stands at the revision the caller read. ARGV: id, revision, status it must
-- be in, score ('' = keep its place in the line), then name, value pairs.
-- Returns {'edited', replica, attempt} | {'stale'} | {'unknown'}.
local id, revision, status, score = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = request_key(id)
local record = redis.call('HMGET', key, 'status', 'revision', 'replica', 'attempt', 'hidden')
if not record[1] or record[5] == '1' then return {'unknown'} end
if record[1] ~= status or record[2] ~= revision then return {'stale'} end
-- Its place in the line and its share of the work there may both change.
if status == 'queued' then dequeue(id, record[3]) end
unlist(id)
redis.call('HSET', key, unpack(ARGV, 5))
list(id)
redis.call('HINCRBY', key, 'revision', 1)
if score ~= '' then redis.call('HSET', key, 'score', score) end
if status == 'queued' then enqueue(id, record[3]) end
watch_deadline(id)
announce('edited', id, status, record[4])
return {'edited', record[3], record[4]}
