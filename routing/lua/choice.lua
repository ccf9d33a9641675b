-- Laid before every script after record.lua: which replica is to have a request.
-- Work is denoising steps x pixels x frames x outputs. A replica's rate is the seconds that it was busy
-- over the work that it did then, both fading with each request, so it follows sharing and load.
local FADE = 0.9

-- Names in the rotation of a stage, in the order of their numbers (replica2 before replica10).
local function rotation(stage, now)
  local names = redis.call('ZRANGEBYSCORE', key.ready(stage), '(' .. now, '+inf')
  local function number(name) return tonumber(string.match(name, '%d+$') or '0') end
  table.sort(names, function(a, b)
    if number(a) == number(b) then return a < b end
    return number(a) < number(b)
  end)
  return names
end

-- Requests of the stage whose affinity key has held them long enough may be taken by any replica.
local function release_held(stage, now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.held(stage), '-inf', now, 'LIMIT', 0, 100)) do
    redis.call('ZREM', key.held(stage), id)
    redis.call('HSET', key.request(id), field.held_until, '')
    local score = redis.call('HGET', key.request(id), field.score)
    if score then redis.call('ZADD', key.spare(stage), score, id) end
  end
end

-- Whether a replica has nothing to come for, and could take a request from another's queue.
local function others_wait(stage, replica)
  return redis.call('ZCARD', key.waiting(replica)) == 0 and redis.call('LLEN', key.queue(replica)) == 0
    and redis.call('ZCARD', key.spare(stage)) > 0
end

-- Requests that a replica may run at a time.
local function capacity_of(name) return tonumber(redis.call('HGET', key.replica(name), field.capacity) or '1') end

-- How far a replica is from taking one more at once: 0 idle, 1 with room, 2 full.
local function fullness(name)
  local taken = redis.call('ZCARD', key.waiting(name)) + redis.call('SCARD', key.running(name))
  if taken == 0 then return 0 end
  return taken < capacity_of(name) and 1 or 2
end

-- The first that is idle, else with room; else the first.
local function most_idle(names)
  local best, least = names[1], 3
  for _, name in ipairs(names) do
    local value = fullness(name)
    if value < least then best, least = name, value end
    if value == 0 then break end
  end
  return best
end

-- The replica begins to be busy, or goes on.
local function begin_work(name, now)
  if redis.call('SCARD', key.running(name)) == 0 then
    redis.call('HSET', key.totals(name), field.busy_from, now)
  else
    redis.call('HSETNX', key.totals(name), field.busy_from, now)
  end
end

-- The replica did `work` since it began, or since it last ended something.
local function count_work(name, work, now)
  local from, busy_s, busy_work = get(key.totals(name), field.busy_from, field.busy_s, field.busy_work)
  redis.call('HSET', key.totals(name), field.busy_from, now)
  if not from then return end
  local seconds = math.max(0, tonumber(now) - tonumber(from))
  redis.call('HSET', key.totals(name),
    field.busy_s, string.format('%.17g', FADE * tonumber(busy_s or '0') + seconds),
    field.busy_work, string.format('%.17g', FADE * tonumber(busy_work or '0') + work))
end

-- What is left to do of a request that runs.
local function work_left(id)
  local work, step, steps = get(key.request(id), field.work, field.step, field.steps)
  work, step, steps = tonumber(work or '0'), tonumber(step or '0'), tonumber(steps or '0')
  if steps == 0 then return work end
  return work * (steps - step) / steps
end

-- The work that waits and runs there.
local function work_of(name)
  local work = tonumber(redis.call('GET', key.work(name)) or '0')
  for _, id in ipairs(redis.call('SMEMBERS', key.running(name))) do work = work + work_left(id) end
  return work
end

-- Seconds for each unit of work; nil before it has done any.
local function rate_of(name)
  local busy_s, busy_work = get(key.totals(name), field.busy_s, field.busy_work)
  local work = tonumber(busy_work or '0')
  if work > 0 then return tonumber(busy_s) / work end
  return nil
end

-- Of the names, the one with the lowest `measure`, and that; the first of equals. nil is left out.
local function lowest(names, measure)
  local best, low = nil, nil
  for _, name in ipairs(names) do
    local value = measure(name)
    if value and (not low or value < low) then best, low = name, value end
  end
  return best, low
end

-- Of those with equal queues the one that runs less, so that an idle one comes first.
local function shortest_queue(names)
  return (lowest(names, function(name)
    return redis.call('ZCARD', key.waiting(name)) * 1000 + redis.call('SCARD', key.running(name))
  end))
end

-- The replica that would end `work` more the earliest. One that has no rate yet counts as the mean.
local function earliest_finish(names, work)
  local rates, sum, known = {}, 0, 0
  for _, name in ipairs(names) do
    rates[name] = rate_of(name)
    if rates[name] then sum, known = sum + rates[name], known + 1 end
  end
  local mean = (known > 0 and sum > 0) and sum / known or 1
  return (lowest(names, function(name) return (rates[name] or mean) * (work_of(name) + work) end))
end

-- The replica of an affinity key, by rendezvous hashing (Thaler & Ravishankar 1998): each key ranks all
-- names in an order of its own, so that a replica which comes or goes moves no other's keys.
local function by_affinity(names, affinity)
  local best, highest = nil, nil
  for _, name in ipairs(names) do
    local rank = redis.sha1hex(affinity .. '\n' .. name)
    if not highest or rank > highest then best, highest = name, rank end
  end
  return best
end

-- From when a new request counts as sent, so that clients take turns by the work that they ask for: start-time
-- fair queueing (Goyal, Vin & Cheng 1996). The first that waits is the virtual time; each request puts the next
-- one of its client back by the seconds that the stage needs for it, within a bound. Requests of nobody are those
-- of one client, once there is another. Returns that, and the seconds.
local function in_turn(stage, client, work, now, names, put_back)
  if client == '' and redis.call('ZCARD', key.clients(stage)) == 0 then return now, '' end
  local first = redis.call('ZRANGE', key.spare(stage), 0, 0)[1]
  local begun = first and tonumber(redis.call('HGET', key.request(first), field.counted_at) or now) or tonumber(now)
  redis.call('ZREMRANGEBYSCORE', key.clients(stage), '-inf', begun)
  local sum, known = 0, 0
  for _, name in ipairs(names) do
    local rate = rate_of(name)
    if rate then sum, known = sum + rate, known + 1 end
  end
  local seconds = known > 0 and sum / known * work / #names or 1
  local counted_at = tonumber(redis.call('ZSCORE', key.clients(stage), client) or begun)
  redis.call('ZADD', key.clients(stage), string.format('%.17g', counted_at + seconds), client)
  return math.min(counted_at, begun + put_back), string.format('%.17g', seconds)
end

-- Seconds in which some queue of the stage becomes one shorter; nil while no rate is known.
local function seconds_to_room(names)
  local _, seconds = lowest(names, function(name)
    local count = redis.call('ZCARD', key.waiting(name)) + redis.call('SCARD', key.running(name))
    local rate = rate_of(name)
    if not rate or count == 0 then return nil end
    return rate * work_of(name) / count
  end)
  return seconds
end
