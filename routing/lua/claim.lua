-- A replica takes the first request of its queue; where that is empty, the first of its stage that waits for
-- another replica. With several slots it may be one further back, which can share steps with what runs there.
-- ARGV: replica, incarnation, now, times that a request may be overtaken so.
-- Returns {the record as name, value pairs, '1' where more wait for others and nothing for it}, or false where
-- nothing waits, the replica was taken out of the rotation by hand or is to end, or its name now belongs to a
-- newer process. A request that was running in a crash, or is suspected of one, runs alone, so that the next
-- crash can blame only it: 'alone' where that forbids a claim now.
local replica, incarnation, now, most_overtaken = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
-- So far back it looks for one that can share steps.
local LOOK = 32
-- So many that may not be taken now are passed over in the queues of others.
local PASSED = 20
-- Seconds for which a new request is left to its own replica where that has room: its wake-up is on the way.
local ITS_OWN = 1

local newest, restart, stage = get(key.replica(replica), field.incarnation, field.restart, field.stage)
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

-- The wake-up of what was taken goes with it, or its replica would be woken for nothing.
local function steal(id, former)
  if redis.call('LLEN', key.queue(former)) > redis.call('ZCARD', key.waiting(former)) then
    redis.call('RPOP', key.queue(former))
  end
  redis.call('HSET', key.request(id), field.replica, replica)
  redis.call('HINCRBY', key.totals(replica), field.stolen, 1)
end

-- How many run here that a request could share steps with, by what it must have in common with them.
local sharing = nil
local function count_sharing()
  sharing = {}
  for _, id in ipairs(running) do
    local shares = redis.call('HGET', key.request(id), field.shares)
    if shares and shares ~= '' then sharing[shares] = (sharing[shares] or 0) + 1 end
  end
end

-- The one to take of a queue from `from` on, and those that it overtakes: the first that shares steps with the
-- most that run. Nobody overtakes a higher priority, one that must start by a moment, or one that was
-- overtaken often enough.
local function choose(queue, from)
  if #running == 0 or most_overtaken == 0 or capacity_of(replica) == 1 then
    return redis.call('ZRANGE', queue, from, from)[1], {}
  end
  if not sharing then count_sharing() end
  local ids = redis.call('ZRANGE', queue, from, from + LOOK - 1)
  local best, most, first_priority = 1, 0, nil
  for place, id in ipairs(ids) do
    local shares, priority, start_by, overtaken =
      get(key.request(id), field.shares, field.priority, field.start_by, field.overtaken)
    first_priority = first_priority or priority
    if priority ~= first_priority or runs_alone(id) then break end
    local count = shares and sharing[shares] or 0
    if count > most then best, most = place, count end
    if most == #running or (start_by and start_by ~= '') or tonumber(overtaken or '0') >= most_overtaken then
      break
    end
  end
  return ids[best], {unpack(ids, 1, best - 1)}
end

local function has_room(name)
  local expires_at = redis.call('ZSCORE', key.ready(stage), name)
  return expires_at and tonumber(expires_at) > tonumber(now)
    and redis.call('SCARD', key.running(name)) < capacity_of(name)
end

local passed = 0
while true do
  local id, overtaken = choose(key.waiting(replica), 0)
  local own = id ~= nil
  if not own then
    release_held(stage, now)
    id, overtaken = choose(key.spare(stage), passed)
  end
  if not id or passed > PASSED then return false end
  local status, its_replica, start_by, attempt, begun, created_at = get(key.request(id),
    field.status, field.replica, field.start_by, field.attempt, field.begun, field.created_at)
  if status ~= 'queued' or (own and its_replica ~= replica) then
    redis.call('ZREM', key.spare(stage), id)
    dequeue(id, own and replica or its_replica or '')
  elseif begun ~= '1' and start_by and start_by ~= '' and tonumber(start_by) <= tonumber(now) then
    expire(id, now)
  elseif #running > 0 and runs_alone(id) then
    if own then return 'alone' end
    passed = passed + 1
  elseif not own and tonumber(now) - tonumber(created_at) < ITS_OWN and has_room(its_replica) then
    passed = passed + 1
  else
    dequeue(id, its_replica)
    if not own then steal(id, its_replica) end
    for _, each in ipairs(overtaken) do redis.call('HINCRBY', key.request(each), field.overtaken, 1) end
    begin_work(replica, now)
    redis.call('SADD', key.running(replica), id)
    redis.call('HSET', key.request(id), field.owner, incarnation, field.started_at, now, field.begun, '1',
      field.step, '0', field.steps, '0', field.crashed_beside, '', field.held_until, '')
    set_status(id, 'running')
    watch_deadline(id)
    outbox_add(id, 'started', now)
    announce('started', id, 'running', attempt, 'replica', replica)
    return {redis.call('HGETALL', key.request(id)), others_wait(stage, replica) and '1' or ''}
  end
end
