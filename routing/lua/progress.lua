-- Records how far a claimed request is. ARGV: id, attempt, incarnation, step, steps, seconds per step,
-- moment at which a webhook is told of it: what comes in between goes into the same message.
-- Returns {cancel, revision} while the claim holds, false once the request is no longer the caller's.
local id, attempt, owner, step, steps, step_s = unpack(ARGV, 1, 6)
local record = records.get(id, 'status', 'attempt', 'owner', 'cancel', 'revision', 'step', 'steps')
if record.status ~= 'running' or record.attempt ~= attempt or record.owner ~= owner then return false end
if record.step ~= step or record.steps ~= steps then
  records.set(id, 'step', step, 'steps', steps, 'step_s', step_s)
  outbox_add(id, 'progress', ARGV[7])
  announce('progress', id, 'running', attempt, 'step', step, 'steps', steps, 'step_s', step_s)
end
return {record.cancel or '', record.revision or '0'}
