#!lua flags=allow-oom
-- The learner speaks on the control stream. A full server is emptied by training, which comes after
-- publication, so these few bytes must always find room.   KEYS: fence, control   ARGV: fence, message
local fence = redis.call('GET', KEYS[1])
if fence and tonumber(fence) > tonumber(ARGV[1]) then return redis.error_reply('FENCED ' .. fence) end
redis.call('XADD', KEYS[2], 'MAXLEN', 64, '*', 'r', ARGV[2])
return 1
