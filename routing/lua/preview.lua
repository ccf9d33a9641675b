-- Keeps the newest preview of a claimed request. ARGV: id, attempt, incarnation, step, picture, seconds kept.
-- Returns 1, or 0 once the request is no longer the caller's.
local record = redis.call('HMGET', request_key(ARGV[1]), 'status', 'attempt', 'owner')
if record[1] ~= 'running' or record[2] ~= ARGV[2] or record[3] ~= ARGV[3] then return 0 end
redis.call('SET', preview_key(ARGV[1]), ARGV[5], 'EX', ARGV[6])
announce('preview', ARGV[1], 'running', ARGV[2], 'step', ARGV[4])
return 1
