-- Keeps the newest preview of a claimed request. ARGV: id, attempt, incarnation, step, picture, seconds kept.
-- Returns 1, or 0 once the request is no longer the caller's.
local id, attempt, owner, step = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local status, now_attempt, now_owner = get(key.request(id), field.status, field.attempt, field.owner)
if status ~= 'running' or now_attempt ~= attempt or now_owner ~= owner then return 0 end
redis.call('SET', key.preview(id), ARGV[5], 'EX', ARGV[6])
announce('preview', id, 'running', attempt, 'step', step)
return 1
