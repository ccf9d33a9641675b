-- Laid before every script of this folder: key names and the few moves that several scripts share.
-- KEYS[1] is the prefix. Numbers that are times are seconds since the epoch, as strings.
local prefix = KEYS[1]

local function request_key(id) return prefix .. 'request:' .. id end
local function preview_key(id) return prefix .. 'request:' .. id .. ':preview' end
local function replica_key(name) return prefix .. 'replica:' .. name end
local function waiting_key(name) return prefix .. 'replica:' .. name .. ':waiting' end
local function running_key(name) return prefix .. 'replica:' .. name .. ':running' end
local function work_key(name) return prefix .. 'replica:' .. name .. ':work' end
local function totals_key(name) return prefix .. 'replica:' .. name .. ':totals' end
local function ready_key(stage) return prefix .. 'stage:' .. stage .. ':ready' end
local function idempotency_key(key) return prefix .. 'idempotency:' .. key end
local function listed_key(status, model) return prefix .. 'requests:' .. status .. ':' .. model end
local function kind_key(kind) return prefix .. 'requests:kind:' .. kind end

-- Tells whoever follows the request. `event` is queued, started, progress, preview, edited, canceling or
-- a terminal status; further name, value pairs belong to it.
local function announce(event, id, status, attempt, ...)
  redis.call('XADD', prefix .. 'changes', 'MAXLEN', '~', '10000', '*',
    'event', event, 'id', id, 'status', status, 'attempt', attempt, ...)
end

-- The lists of records, each by creation time: all, by status, by model, by both, by kind of output.
local function lists(status, model, kind)
  return {prefix .. 'requests', prefix .. 'requests:' .. status, listed_key('any', model),
    listed_key(status, model), kind_key(kind or '')}
end

-- Takes a record out of every list, so that nobody finds it by looking through them.
local function unlist(id)
  local record = redis.call('HMGET', request_key(id), 'status', 'model', 'kind')
  if not record[1] then return end
  for _, key in ipairs(lists(unpack(record))) do redis.call('ZREM', key, id) end
end

-- Puts a record into the lists that its status, model and kind belong to, unless clients see it no more.
local function list(id)
  local record = redis.call('HMGET', request_key(id), 'status', 'model', 'kind', 'created_at', 'hidden')
  if record[5] == '1' then return end
  for _, key in ipairs(lists(unpack(record, 1, 3))) do redis.call('ZADD', key, record[4], id) end
end

-- The one way to a status: the record, and the lists that it stands in.
local function set_status(id, status)
  unlist(id)
  redis.call('HSET', request_key(id), 'status', status)
  list(id)
end

-- Puts a request into the line of a replica, at the place and with the work that its record says.
local function enqueue(id, replica)
  local key = request_key(id)
  local record = redis.call('HMGET', key, 'score', 'work')
  redis.call('HSET', key, 'replica', replica)
  redis.call('ZADD', waiting_key(replica), record[1], id)
  redis.call('INCRBY', work_key(replica), record[2])
end

-- Takes a request out of the line of a replica, if it stands there.
local function dequeue(id, replica)
  if redis.call('ZREM', waiting_key(replica), id) == 0 then return end
  if redis.call('ZCARD', waiting_key(replica)) == 0 then
    redis.call('DEL', work_key(replica))
  else
    redis.call('DECRBY', work_key(replica), redis.call('HGET', request_key(id), 'work') or '0')
  end
end

-- Enters a webhook delivery, due at a moment, where the client wants to be told of the event.
local function owe(id, event, moment)
  local wanted = redis.call('HGET', request_key(id), 'webhook')
  if not wanted or wanted == '' then return end
  for _, name in ipairs(cjson.decode(wanted).events) do
    if name == event then
      redis.call('ZADD', prefix .. 'deliveries', 'NX', moment, id .. ' ' .. event)
    end
  end
end

local function owe_no_more(id, ...)
  for _, event in ipairs({...}) do redis.call('ZREM', prefix .. 'deliveries', id .. ' ' .. event) end
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

-- Lets a client use the idempotency key of a request again, unless it is another's by now.
local function release_key(id)
  local key = redis.call('HGET', request_key(id), 'idempotency_key')
  if not key or key == '' then return end
  local known = redis.call('GET', idempotency_key(key))
  if known and string.match(known, ' (%S+)$') == id then redis.call('DEL', idempotency_key(key)) end
end

-- Removes every trace of a record; its files are the caller's.
local function forget(id)
  local key = request_key(id)
  release_key(id)
  local replica = redis.call('HGET', key, 'replica')
  if replica then
    dequeue(id, replica)
    redis.call('SREM', running_key(replica), id)
  end
  unlist(id)
  redis.call('ZREM', prefix .. 'finished', id)
  redis.call('ZREM', prefix .. 'deadlines', id)
  redis.call('DEL', key, preview_key(id))
  owe_no_more(id, 'started', 'progress', 'ended')
end

-- Notes that the files of a record that is removed may outlive it: nobody can remove both at once.
local function leave_loose(id, now) redis.call('ZADD', prefix .. 'loose', now, id) end

-- The one way into a terminal state. `fields` are further name, value pairs to set with it.
local function finish(id, status, now, fields)
  local key = request_key(id)
  local record = redis.call('HMGET', key, 'replica', 'attempt', 'hidden')
  dequeue(id, record[1])
  redis.call('SREM', running_key(record[1]), id)
  redis.call('DEL', preview_key(id))
  if record[3] == '1' then
    announce(status, id, status, record[2])
    leave_loose(id, now)
    forget(id)
    return
  end
  set_status(id, status)
  redis.call('HSET', key, 'finished_at', now, unpack(fields))
  watch_deadline(id)
  redis.call('ZADD', prefix .. 'finished', now, id)
  owe_no_more(id, 'progress')
  owe(id, 'ended', now)
  announce(status, id, status, record[2])
end

local function failure(code, message, retryable)
  return cjson.encode({code = code, message = message, retryable = retryable})
end

local function expire(id, now)
  finish(id, 'expired', now, {'error', failure('expired',
    'The request did not start within its expires_in; send it again with a longer one.', true)})
end
