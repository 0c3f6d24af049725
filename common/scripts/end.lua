#!lua flags=allow-oom
-- The run is over, for every role to see.   KEYS: fence, ended   ARGV: fence, reason
local fence = redis.call('GET', KEYS[1])
if fence and tonumber(fence) > tonumber(ARGV[1]) then return redis.error_reply('FENCED ' .. fence) end
redis.call('SET', KEYS[2], ARGV[2])
return 1
