-- Laid before every script of this folder: access to the hashes, and the moves that several scripts share.
-- Before it comes what routing/lua/__init__.py makes of the tables of routing/keys.py: `key` has the names of
-- keys, `fields` those of the fields of each hash. Times are seconds since the epoch, as strings.

-- Raised here rather than read as nil, so that a name that is spelled wrongly is found by the first test.
local named_fields_only = {__index = function(_, name) error('the field ' .. name .. ' was not asked for') end}

-- Access to one kind of hash by names that are in the table of its fields.
local function hash(key_of, known)
  local function check(names, step)
    for place = 1, #names, step do
      if not known[names[place]] then error('routing/keys.py has no field ' .. tostring(names[place])) end
    end
  end
  return {
    -- Returns the fields by name; false where one is not set.
    get = function(id, ...)
      local names, found = {...}, setmetatable({}, named_fields_only)
      check(names, 1)
      local values = redis.call('HMGET', key_of(id), ...)
      for place, name in ipairs(names) do rawset(found, name, values[place]) end
      return found
    end,
    set = function(id, ...)
      check({...}, 2)
      redis.call('HSET', key_of(id), ...)
    end,
    set_once = function(id, name, value)
      check({name}, 1)
      redis.call('HSETNX', key_of(id), name, value)
    end,
    clear = function(id, ...)
      check({...}, 1)
      redis.call('HDEL', key_of(id), ...)
    end,
    add = function(id, name, amount)
      check({name}, 1)
      return redis.call('HINCRBY', key_of(id), name, amount)
    end,
  }
end

local records = hash(key.request, fields.record)
local replicas = hash(key.replica, fields.replica)
local totals = hash(key.totals, fields.totals)

-- Tells whoever follows the request. `event` is queued, started, progress, preview, edited, canceling or
-- a terminal status; further name, value pairs belong to it.
local function announce(event, id, status, attempt, ...)
  redis.call('XADD', key.changes, 'MAXLEN', '~', '10000', '*',
    'event', event, 'id', id, 'status', status, 'attempt', attempt, ...)
end

-- The lists that a record belongs to, each by creation time.
local function lists(record)
  local found = {key.requests, key.by_status(record.status), key.by_model(record.model),
    key.by_status_and_model(record.status, record.model)}
  if record.kind then table.insert(found, key.by_kind(record.kind)) end
  return found
end

local function enter_lists(id)
  local record = records.get(id, 'status', 'model', 'kind', 'hidden', 'created_at')
  if record.hidden == '1' then return end
  for _, list in ipairs(lists(record)) do redis.call('ZADD', list, record.created_at, id) end
end

local function leave_lists(id)
  local record = records.get(id, 'status', 'model', 'kind')
  if not record.status then return end
  for _, list in ipairs(lists(record)) do redis.call('ZREM', list, id) end
end

-- The one way to a status: the record, and the lists that it belongs to.
local function set_status(id, status)
  leave_lists(id)
  records.set(id, 'status', status)
  enter_lists(id)
end

-- Puts a request into the queue of a replica, with the score and the work that its record has.
local function enqueue(id, replica)
  local record = records.get(id, 'score', 'work')
  records.set(id, 'replica', replica)
  redis.call('ZADD', key.waiting(replica), record.score, id)
  redis.call('INCRBY', key.work(replica), record.work)
end

-- Takes a request out of the queue of a replica, if it is there.
local function dequeue(id, replica)
  if redis.call('ZREM', key.waiting(replica), id) == 0 then return end
  if redis.call('ZCARD', key.waiting(replica)) == 0 then
    redis.call('DEL', key.work(replica))
  else
    redis.call('DECRBY', key.work(replica), records.get(id, 'work').work or '0')
  end
end

-- Puts a webhook delivery into the outbox, due at a moment, where the client wants to be told of the event.
local function outbox_add(id, event, moment)
  local webhook = records.get(id, 'webhook').webhook
  if not webhook or webhook == '' then return end
  for _, name in ipairs(cjson.decode(webhook).events) do
    if name == event then redis.call('ZADD', key.deliveries, 'NX', moment, id .. ' ' .. event) end
  end
end

local function outbox_remove(id, ...)
  for _, event in ipairs({...}) do redis.call('ZREM', key.deliveries, id .. ' ' .. event) end
end

-- Keeps the list of waiting requests that must start by a moment; one that has begun once has done so.
local function watch_deadline(id)
  local record = records.get(id, 'start_by', 'begun', 'status')
  if record.start_by and record.start_by ~= '' and record.begun ~= '1' and record.status == 'queued' then
    redis.call('ZADD', key.deadlines, record.start_by, id)
  else
    redis.call('ZREM', key.deadlines, id)
  end
end

-- Lets a client use the idempotency key of a request again, unless it is another's by now.
local function release_key(id)
  local name = records.get(id, 'idempotency_key').idempotency_key
  if not name or name == '' then return end
  local known = redis.call('GET', key.idempotency(name))
  if known and string.match(known, ' (%S+)$') == id then redis.call('DEL', key.idempotency(name)) end
end

-- Removes every trace of a record; its files are the caller's.
local function forget(id)
  release_key(id)
  local replica = records.get(id, 'replica').replica
  if replica then
    dequeue(id, replica)
    redis.call('SREM', key.running(replica), id)
  end
  leave_lists(id)
  redis.call('ZREM', key.finished, id)
  redis.call('ZREM', key.deadlines, id)
  redis.call('DEL', key.request(id), key.preview(id))
  outbox_remove(id, 'started', 'progress', 'ended')
end

-- Notes that the files of a record that is removed may outlive it: nobody can remove both at once.
local function note_orphaned(id, now) redis.call('ZADD', key.orphaned, now, id) end

-- The one way into a terminal state. Further name, value pairs are set with it.
local function finish(id, status, now, ...)
  local record = records.get(id, 'replica', 'attempt', 'hidden')
  dequeue(id, record.replica)
  redis.call('SREM', key.running(record.replica), id)
  redis.call('DEL', key.preview(id))
  if record.hidden == '1' then
    announce(status, id, status, record.attempt)
    note_orphaned(id, now)
    forget(id)
    return
  end
  set_status(id, status)
  records.set(id, 'finished_at', now, ...)
  watch_deadline(id)
  redis.call('ZADD', key.finished, now, id)
  outbox_remove(id, 'progress')
  outbox_add(id, 'ended', now)
  announce(status, id, status, record.attempt)
end

local function failure(code, message, retryable)
  return cjson.encode({code = code, message = message, retryable = retryable})
end

local function expire(id, now)
  finish(id, 'expired', now, 'error', failure('expired',
    'The request did not start within its expires_in; send it again with a longer one.', true))
end
