-- Cancels a request, and removes it too where ARGV[3] is '1'. ARGV: id, now, remove.
-- Returns {'unknown'} | {'canceled'} | {'terminal'} | {'stopping', replica, attempt}.
local id, now, remove = ARGV[1], ARGV[2], ARGV[3] == '1'
local status, replica, attempt, hidden =
  get(key.request(id), field.status, field.replica, field.attempt, field.hidden)
if not status or hidden == '1' then return {'unknown'} end
if status == 'running' then
  redis.call('HSET', key.request(id), field.cancel, '1')
  if remove then
    -- The replica still needs the record to end its claim; nobody else sees it from now on.
    redis.call('HSET', key.request(id), field.hidden, '1')
    leave_lists(id)
    release_key(id)
  end
  announce('canceling', id, 'running', attempt)
  return {'stopping', replica, attempt}
end
local answer = 'terminal'
if status == 'queued' then
  finish(id, 'canceled', now)
  answer = 'canceled'
end
if remove then
  note_orphaned(id, now)
  forget(id)
end
return {answer}
