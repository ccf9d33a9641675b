-- A replica takes the first request of its queue. ARGV: replica, incarnation, now.
-- Returns the record as name, value pairs, or false where nothing waits, the replica was taken out of
-- the rotation by hand or is to end, or its name now belongs to a newer process. A request that was
-- running in a crash, or is suspected of one, runs alone, so that the next crash can blame only it:
-- 'alone' where that forbids a claim now.
local replica, incarnation, now = ARGV[1], ARGV[2], ARGV[3]

local newest, restart = get(key.replica(replica), field.incarnation, field.restart)
if newest ~= incarnation or restart == incarnation then return false end
if redis.call('SISMEMBER', key.drained, replica) == 1 then return false end
local function runs_alone(id)
  local crashes, suspect = get(key.request(id), field.crashes, field.suspect)
  return tonumber(crashes or '0') > 0 or suspect == '1'
end
local running = redis.call('SMEMBERS', key.running(replica))
for _, id in ipairs(running) do
  if runs_alone(id) then return 'alone' end
end
while true do
  local id = redis.call('ZRANGE', key.waiting(replica), 0, 0)[1]
  if not id then return false end
  local status, its_replica, start_by, attempt, begun =
    get(key.request(id), field.status, field.replica, field.start_by, field.attempt, field.begun)
  if status ~= 'queued' or its_replica ~= replica then
    dequeue(id, replica)
  elseif begun ~= '1' and start_by and start_by ~= '' and tonumber(start_by) <= tonumber(now) then
    expire(id, now)
  elseif #running > 0 and runs_alone(id) then
    return 'alone'
  else
    dequeue(id, replica)
    begin_work(replica, now)
    redis.call('SADD', key.running(replica), id)
    redis.call('HSET', key.request(id), field.owner, incarnation, field.started_at, now, field.begun, '1',
      field.step, '0', field.steps, '0', field.crashed_beside, '')
    set_status(id, 'running')
    watch_deadline(id)
    outbox_add(id, 'started', now)
    announce('started', id, 'running', attempt, 'replica', replica)
    return redis.call('HGETALL', key.request(id))
  end
end
