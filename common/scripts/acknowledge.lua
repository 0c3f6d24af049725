#!lua flags=allow-oom
-- The learner needs a verdict no more.   KEYS: fence, verdicts   ARGV: fence, entry
local fence = redis.call('GET', KEYS[1])
if fence and tonumber(fence) > tonumber(ARGV[1]) then return redis.error_reply('FENCED ' .. fence) end
redis.call('XACK', KEYS[2], 'workers', ARGV[2])
redis.call('XDEL', KEYS[2], ARGV[2])
return 1
