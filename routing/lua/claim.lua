-- A replica takes the first request of its queue. ARGV: replica, incarnation, now.
-- Returns the record as name, value pairs, or false where nothing waits, the replica was taken out of
-- the rotation by hand or is to end, or its name now belongs to a newer process. A request that was
-- running in a crash, or is suspected of one, runs alone, so that the next crash can blame only it:
-- 'alone' where that forbids a claim now.
local replica, incarnation, now = ARGV[1], ARGV[2], ARGV[3]

local known = replicas.get(replica, 'incarnation', 'restart')
if known.incarnation ~= incarnation or known.restart == incarnation then return false end
if redis.call('SISMEMBER', key.drained, replica) == 1 then return false end
local function runs_alone(id)
  local record = records.get(id, 'crashes', 'suspect')
  return tonumber(record.crashes or '0') > 0 or record.suspect == '1'
end
local running = redis.call('SMEMBERS', key.running(replica))
for _, id in ipairs(running) do
  if runs_alone(id) then return 'alone' end
end
while true do
  local id = redis.call('ZRANGE', key.waiting(replica), 0, 0)[1]
  if not id then return false end
  local record = records.get(id, 'status', 'replica', 'start_by', 'attempt', 'begun')
  local start_by = record.start_by and record.start_by ~= '' and tonumber(record.start_by)
  if record.status ~= 'queued' or record.replica ~= replica then
    dequeue(id, replica)
  elseif record.begun ~= '1' and start_by and start_by <= tonumber(now) then
    expire(id, now)
  elseif #running > 0 and runs_alone(id) then
    return 'alone'
  else
    dequeue(id, replica)
    begin_work(replica, now)
    redis.call('SADD', key.running(replica), id)
    records.set(id, 'owner', incarnation, 'started_at', now, 'begun', '1', 'step', '0', 'steps', '0',
      'crashed_beside', '')
    set_status(id, 'running')
    watch_deadline(id)
    outbox_add(id, 'started', now)
    announce('started', id, 'running', record.attempt, 'replica', replica)
    return redis.call('HGETALL', key.request(id))
  end
end
