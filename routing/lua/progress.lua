-- Records how far a claimed request is. ARGV: id, attempt, incarnation, step, steps, seconds per step,
-- moment at which a webhook is told of it: what comes in between goes into the same message.
-- Returns {cancel, revision} while the claim holds, false once the request is no longer the caller's.
local id, attempt, owner, step, steps, step_s = unpack(ARGV, 1, 6)
local status, now_attempt, now_owner, cancel, revision, known_step, known_steps = get(key.request(id),
  field.status, field.attempt, field.owner, field.cancel, field.revision, field.step, field.steps)
if status ~= 'running' or now_attempt ~= attempt or now_owner ~= owner then return false end
if known_step ~= step or known_steps ~= steps then
  redis.call('HSET', key.request(id), field.step, step, field.steps, steps, field.step_s, step_s)
  outbox_add(id, 'progress', ARGV[7])
  announce('progress', id, 'running', attempt, 'step', step, 'steps', steps, 'step_s', step_s)
end
return {cancel or '', revision or '0'}
