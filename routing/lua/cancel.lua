-- Cancels a request, and removes it too where ARGV[3] is '1'. ARGV: id, now, remove.
-- Returns {'unknown'} | {'canceled'} | {'terminal'} | {'stopping', replica, attempt}.
local id, now, remove = ARGV[1], ARGV[2], ARGV[3] == '1'
local key = request_key(id)
local record = redis.call('HMGET', key, 'status', 'replica', 'attempt', 'hidden')
if not record[1] or record[4] == '1' then return {'unknown'} end
if record[1] == 'running' then
  redis.call('HSET', key, 'cancel', '1')
  if remove then
    -- The replica still needs the record to end its claim; nobody else sees it from now on.
    redis.call('HSET', key, 'hidden', '1')
    unlist(id)
    release_key(id)
  end
  announce('canceling', id, 'running', record[3])
  return {'stopping', record[2], record[3]}
end
local answer = 'terminal'
if record[1] == 'queued' then
  finish(id, 'canceled', now, {})
  answer = 'canceled'
end
if remove then
  leave_loose(id, now)
  forget(id)
end
return {answer}
