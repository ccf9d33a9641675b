-- Laid before every script of this folder: key names and the few moves that several scripts share.
-- KEYS[1] is the prefix. Numbers that are times are seconds since the epoch, as strings.
local prefix = KEYS[1]

local function request_key(id) return prefix .. 'request:' .. id end
local function preview_key(id) return prefix .. 'request:' .. id .. ':preview' end
local function replica_key(name) return prefix .. 'replica:' .. name end
local function waiting_key(name) return prefix .. 'replica:' .. name .. ':waiting' end
local function running_key(name) return prefix .. 'replica:' .. name .. ':running' end
local function totals_key(name) return prefix .. 'replica:' .. name .. ':totals' end
local function ready_key(stage) return prefix .. 'stage:' .. stage .. ':ready' end

-- Tells whoever follows the request. `event` is queued, started, progress, preview, edited, canceling or
-- a terminal status; further name, value pairs belong to it.
local function announce(event, id, status, attempt, ...)
  redis.call('XADD', prefix .. 'changes', 'MAXLEN', '~', '10000', '*',
    'event', event, 'id', id, 'status', status, 'attempt', attempt, ...)
end

-- Keeps the list of waiting requests that must start by a moment; one that has begun once has done so.
local function watch_deadline(id)
  local record = redis.call('HMGET', request_key(id), 'start_by', 'begun', 'status')
  if record[1] and record[1] ~= '' and record[2] ~= '1' and record[3] == 'queued' then
    redis.call('ZADD', prefix .. 'deadlines', record[1], id)
  else
    redis.call('ZREM', prefix .. 'deadlines', id)
  end
end

-- Removes every trace of a record; its files are the caller's.
local function forget(id)
  local key = request_key(id)
  local idempotency = redis.call('HGET', key, 'idempotency_key')
  if idempotency and idempotency ~= '' then
    redis.call('DEL', prefix .. 'idempotency:' .. idempotency)
  end
  local replica = redis.call('HGET', key, 'replica')
  if replica then
    redis.call('ZREM', waiting_key(replica), id)
    redis.call('SREM', running_key(replica), id)
  end
  redis.call('ZREM', prefix .. 'requests', id)
  redis.call('ZREM', prefix .. 'finished', id)
  redis.call('ZREM', prefix .. 'deadlines', id)
  redis.call('DEL', key, preview_key(id))
end

-- The one way into a terminal state. `fields` are further name, value pairs to set with it.
local function finish(id, status, now, fields)
  local key = request_key(id)
  local record = redis.call('HMGET', key, 'replica', 'attempt', 'hidden')
  redis.call('ZREM', waiting_key(record[1]), id)
  redis.call('SREM', running_key(record[1]), id)
  redis.call('DEL', preview_key(id))
  if record[3] == '1' then
    announce(status, id, status, record[2])
    forget(id)
    return
  end
  redis.call('HSET', key, 'status', status, 'finished_at', now, unpack(fields))
  watch_deadline(id)
  redis.call('ZADD', prefix .. 'finished', now, id)
  announce(status, id, status, record[2])
end

local function failure(code, message, retryable)
  return cjson.encode({code = code, message = message, retryable = retryable})
end

local function expire(id, now)
  finish(id, 'expired', now, {'error', failure('expired',
    'The request did not start within its expires_in; send it again with a longer one.', true)})
end

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
