-- Records how far a claimed request is. ARGV: id, attempt, incarnation, step, steps, seconds per step,
-- moment at which a webhook is told of it: what comes in between goes into the same message.
-- Returns {cancel, revision} while the claim holds, false once the request is no longer the caller's.
local key = request_key(ARGV[1])
local record = redis.call('HMGET', key, 'status', 'attempt', 'owner', 'cancel', 'revision', 'step', 'steps')
if record[1] ~= 'running' or record[2] ~= ARGV[2] or record[3] ~= ARGV[3] then return false end
if record[6] ~= ARGV[4] or record[7] ~= ARGV[5] then
  redis.call('HSET', key, 'step', ARGV[4], 'steps', ARGV[5], 'step_s', ARGV[6])
  owe(ARGV[1], 'progress', ARGV[7])
  announce('progress', ARGV[1], 'running', ARGV[2],
    'step', ARGV[4], 'steps', ARGV[5], 'step_s', ARGV[6])
end
return {record[4] or '', record[5] or '0'}
