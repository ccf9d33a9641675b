-- Cancels a request, and removes it too where ARGV[3] is '1'. ARGV: id, now, remove.
-- Returns {'unknown'} | {'canceled'} | {'terminal'} | {'stopping', replica, attempt}.
local id, now, remove = ARGV[1], ARGV[2], ARGV[3] == '1'
local record = records.get(id, 'status', 'replica', 'attempt', 'hidden')
if not record.status or record.hidden == '1' then return {'unknown'} end
if record.status == 'running' then
  records.set(id, 'cancel', '1')
  if remove then
    -- The replica still needs the record to end its claim; nobody else sees it from now on.
    records.set(id, 'hidden', '1')
    leave_lists(id)
    release_key(id)
  end
  announce('canceling', id, 'running', record.attempt)
  return {'stopping', record.replica, record.attempt}
end
local answer = 'terminal'
if record.status == 'queued' then
  finish(id, 'canceled', now)
  answer = 'canceled'
end
if remove then
  note_orphaned(id, now)
  forget(id)
end
return {answer}
