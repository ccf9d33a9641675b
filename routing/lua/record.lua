-- Laid before every script of this folder: the moves that several scripts share. The names in `key` and
-- `field` come from the tables of routing/keys.py (routing/lua/__init__.py); KEYS[1] is the prefix. Times are
-- seconds since the epoch, as strings.

-- Returns the fields of a hash, each false where it is not set.
local function get(hash, ...) return unpack(redis.call('HMGET', hash, ...)) end

-- Tells whoever follows the request. `event` is queued, started, progress, preview, edited, canceling or
-- a terminal status; further name, value pairs belong to it.
local function announce(event, id, status, attempt, ...)
  redis.call('XADD', key.changes, 'MAXLEN', '~', '10000', '*',
    'event', event, 'id', id, 'status', status, 'attempt', attempt, ...)
end

-- The lists of a record, each by creation time: those of its status, and all.
local function status_lists(status, model)
  return {key.by_status(status), key.by_status_and_model(status, model)}
end

local function all_lists(status, model, kind)
  local lists = status_lists(status, model)
  table.insert(lists, key.requests)
  table.insert(lists, key.by_model(model))
  if kind then table.insert(lists, key.by_kind(kind)) end
  return lists
end

local function enter_lists(id)
  local status, model, kind, hidden, created_at =
    get(key.request(id), field.status, field.model, field.kind, field.hidden, field.created_at)
  if hidden == '1' then return end
  for _, list in ipairs(all_lists(status, model, kind)) do redis.call('ZADD', list, created_at, id) end
end

local function leave_lists(id)
  local status, model, kind = get(key.request(id), field.status, field.model, field.kind)
  if not status then return end
  for _, list in ipairs(all_lists(status, model, kind)) do redis.call('ZREM', list, id) end
end

-- The one way from a status to the next: the record, and the lists of its status.
local function set_status(id, status)
  local former, model, hidden, created_at =
    get(key.request(id), field.status, field.model, field.hidden, field.created_at)
  redis.call('HSET', key.request(id), field.status, status)
  if hidden == '1' then return end
  for _, list in ipairs(status_lists(former, model)) do redis.call('ZREM', list, id) end
  for _, list in ipairs(status_lists(status, model)) do redis.call('ZADD', list, created_at, id) end
end

-- Puts a request into the queue of a replica, with the score and the work that its record has. Any idle
-- replica of the stage may take it from there, unless its affinity key still holds it.
local function enqueue(id, replica)
  local score, work, stage, held_until = get(key.request(id), field.score, field.work, field.stage, field.held_until)
  redis.call('HSET', key.request(id), field.replica, replica)
  redis.call('ZADD', key.waiting(replica), score, id)
  redis.call('INCRBY', key.work(replica), work)
  if held_until and held_until ~= '' then
    redis.call('ZADD', key.held(stage), held_until, id)
  else
    redis.call('ZADD', key.spare(stage), score, id)
  end
end

-- Takes a request out of the queue of a replica, if it is there.
local function dequeue(id, replica)
  local stage = redis.call('HGET', key.request(id), field.stage)
  if stage and redis.call('ZREM', key.spare(stage), id) == 0 then redis.call('ZREM', key.held(stage), id) end
  if redis.call('ZREM', key.waiting(replica), id) == 0 then return end
  if redis.call('ZCARD', key.waiting(replica)) == 0 then
    redis.call('DEL', key.work(replica))
  else
    redis.call('DECRBY', key.work(replica), redis.call('HGET', key.request(id), field.work) or '0')
  end
end

-- Puts a webhook delivery into the outbox, due at a moment, where the client wants to be told of the event.
local function outbox_add(id, event, moment)
  local webhook = redis.call('HGET', key.request(id), field.webhook)
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
  local start_by, begun, status = get(key.request(id), field.start_by, field.begun, field.status)
  if start_by and start_by ~= '' and begun ~= '1' and status == 'queued' then
    redis.call('ZADD', key.deadlines, start_by, id)
  else
    redis.call('ZREM', key.deadlines, id)
  end
end

-- Lets a client use the idempotency key of a request again, unless it is another's by now.
local function release_key(id)
  local name = redis.call('HGET', key.request(id), field.idempotency_key)
  if not name or name == '' then return end
  local known = redis.call('GET', key.idempotency(name))
  if known and string.match(known, ' (%S+)$') == id then redis.call('DEL', key.idempotency(name)) end
end

-- Removes every trace of a record; its files are the caller's.
local function forget(id)
  release_key(id)
  local replica = redis.call('HGET', key.request(id), field.replica)
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
  local replica, attempt, hidden, stage, client_s, client, begun = get(key.request(id), field.replica,
    field.attempt, field.hidden, field.stage, field.client_s, field.client, field.begun)
  if client_s and client_s ~= '' and begun ~= '1' and redis.call('ZSCORE', key.clients(stage), client) then
    redis.call('ZINCRBY', key.clients(stage), '-' .. client_s, client)  -- it took nothing
  end
  dequeue(id, replica)
  redis.call('SREM', key.running(replica), id)
  redis.call('DEL', key.preview(id))
  if hidden == '1' then
    announce(status, id, status, attempt)
    note_orphaned(id, now)
    forget(id)
    return
  end
  set_status(id, status)
  redis.call('HSET', key.request(id), field.finished_at, now, ...)
  watch_deadline(id)
  redis.call('ZADD', key.finished, now, id)
  outbox_remove(id, 'progress')
  outbox_add(id, 'ended', now)
  announce(status, id, status, attempt)
end

local function failure(code, message, retryable)
  return cjson.encode({code = code, message = message, retryable = retryable})
end

local function expire(id, now)
  finish(id, 'expired', now, field.error, failure('expired',
    'The request did not start within its expires_in; send it again with a longer one.', true))
end
