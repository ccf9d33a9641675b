-- A replica takes the first request of its line. ARGV: replica, incarnation, now.
-- Returns the record as name, value pairs, or false where nothing waits, the replica was taken out of
-- the rotation by hand or is to end, or its name now belongs to a newer process. A request that was
-- running in a crash, or is suspected of one, runs alone, so that the next crash can blame only it:
-- 'alone' where that forbids a claim now.
local replica, incarnation, now = ARGV[1], ARGV[2], ARGV[3]

local known = redis.call('HMGET', replica_key(replica), 'incarnation', 'restart')
if known[1] ~= incarnation or known[2] == incarnation then return false end
if redis.call('SISMEMBER', prefix .. 'drained', replica) == 1 then return false end
local function runs_alone(id)
  local found = redis.call('HMGET', request_key(id), 'crashes', 'suspect')
  return tonumber(found[1] or '0') > 0 or found[2] == '1'
end
local running = redis.call('SMEMBERS', running_key(replica))
for _, id in ipairs(running) do
  if runs_alone(id) then return 'alone' end
end
while true do
  local id = redis.call('ZRANGE', waiting_key(replica), 0, 0)[1]
  if not id then return false end
  local key = request_key(id)
  local record = redis.call('HMGET', key, 'status', 'replica', 'start_by', 'attempt', 'begun')
  if record[1] ~= 'queued' or record[2] ~= replica then
    dequeue(id, replica)
  elseif record[5] ~= '1' and record[3] and record[3] ~= '' and tonumber(record[3]) <= tonumber(now) then
    expire(id, now)
  elseif #running > 0 and runs_alone(id) then
    return 'alone'
  else
    dequeue(id, replica)
    begin_work(replica, now)
    redis.call('SADD', running_key(replica), id)
    redis.call('HSET', key, 'owner', incarnation, 'started_at', now, 'begun', '1', 'step', '0', 'steps', '0',
      'crashed_beside', '')
    set_status(id, 'running')
    watch_deadline(id)
    owe(id, 'started', now)
    announce('started', id, 'running', record[4], 'replica', replica)
    return redis.call('HGETALL', key)
  end
end
