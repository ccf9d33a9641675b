-- Laid before every script after record.lua: which replica is to have a request.
-- Work is denoising steps x pixels x frames x outputs. A replica's rate is the seconds that it was busy
-- over the work that it did then, both fading with each request, so it follows sharing and load.
local FADE = 0.9

-- Names in the rotation of a stage, in the order of their numbers (replica2 before replica10).
local function rotation(stage, now)
  local names = redis.call('ZRANGEBYSCORE', ready_key(stage), '(' .. now, '+inf')
  local function number(name) return tonumber(string.match(name, '%d+$') or '0') end
  table.sort(names, function(a, b)
    if number(a) == number(b) then return a < b end
    return number(a) < number(b)
  end)
  return names
end

-- The replica begins to be busy, or goes on.
local function begin_work(name, now)
  if redis.call('SCARD', running_key(name)) == 0 then
    redis.call('HSET', totals_key(name), 'busy_from', now)
  else
    redis.call('HSETNX', totals_key(name), 'busy_from', now)
  end
end

-- The replica did `work` since it began, or since it last ended something.
local function count_work(name, work, now)
  local totals = redis.call('HMGET', totals_key(name), 'busy_from', 'busy_s', 'busy_work')
  redis.call('HSET', totals_key(name), 'busy_from', now)
  if not totals[1] then return end
  local seconds = math.max(0, tonumber(now) - tonumber(totals[1]))
  redis.call('HSET', totals_key(name),
    'busy_s', string.format('%.17g', FADE * tonumber(totals[2] or '0') + seconds),
    'busy_work', string.format('%.17g', FADE * tonumber(totals[3] or '0') + work))
end

-- What is left to do of a request that runs.
local function work_left(id)
  local record = redis.call('HMGET', request_key(id), 'work', 'step', 'steps')
  local work, step, steps = tonumber(record[1] or '0'), tonumber(record[2] or '0'), tonumber(record[3] or '0')
  if steps == 0 then return work end
  return work * (steps - step) / steps
end

-- The work that waits and runs there.
local function work_of(name)
  local work = tonumber(redis.call('GET', work_key(name)) or '0')
  for _, id in ipairs(redis.call('SMEMBERS', running_key(name))) do work = work + work_left(id) end
  return work
end

-- Seconds for each unit of work; nil before it has done any.
local function rate_of(name)
  local totals = redis.call('HMGET', totals_key(name), 'busy_s', 'busy_work')
  local work = tonumber(totals[2] or '0')
  if work > 0 then return tonumber(totals[1]) / work end
  return nil
end

-- Of the names, the one with the least of `measure`, and that; the first of equals.
local function least(names, measure)
  local best, lowest = nil, nil
  for _, name in ipairs(names) do
    local value = measure(name)
    if value and (not lowest or value < lowest) then best, lowest = name, value end
  end
  return best, lowest
end

-- The replica that would end `work` more the soonest. One that has no rate yet counts as the mean.
local function soonest(names, work)
  local rates, sum, known = {}, 0, 0
  for _, name in ipairs(names) do
    rates[name] = rate_of(name)
    if rates[name] then sum, known = sum + rates[name], known + 1 end
  end
  local mean = (known > 0 and sum > 0) and sum / known or 1
  return least(names, function(name) return (rates[name] or mean) * (work_of(name) + work) end)
end

-- The replica of an affinity key, by rendezvous hashing (Thaler & Ravishankar 1998): each key ranks all
-- names in an order of its own, so that a replica which comes or goes moves no other's keys.
local function kindred(names, affinity)
  local best, highest = nil, nil
  for _, name in ipairs(names) do
    local rank = redis.sha1hex(affinity .. '\n' .. name)
    if not highest or rank > highest then best, highest = name, rank end
  end
  return best
end

-- Seconds in which some line of the stage becomes one shorter; nil while no rate is known.
local function seconds_to_room(names)
  local _, seconds = least(names, function(name)
    local count = redis.call('ZCARD', waiting_key(name)) + redis.call('SCARD', running_key(name))
    local rate = rate_of(name)
    if not rate or count == 0 then return nil end
    return rate * work_of(name) / count
  end)
  return seconds
end
