-- Keeps the newest preview of a claimed request. ARGV: id, attempt, incarnation, step, picture, seconds kept.
-- Returns 1, or 0 once the request is no longer the caller's.
local id, attempt, owner, step = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local record = records.get(id, 'status', 'attempt', 'owner')
if record.status ~= 'running' or record.attempt ~= attempt or record.owner ~= owner then return 0 end
redis.call('SET', key.preview(id), ARGV[5], 'EX', ARGV[6])
announce('preview', id, 'running', attempt, 'step', step)
return 1
