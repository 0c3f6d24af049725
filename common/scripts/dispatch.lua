#!lua flags=allow-oom
-- Bring a group into the world, or give it another attempt. Idempotent: a call that is
-- repeated after a lost reply finds its attempt there already and does nothing. It runs on a full
-- server: a learner that waited here would empty nothing, and admission bounds what is written.
-- KEYS: fence, open, group, prompts   ARGV: fence, id, attempt, least, prompt, samples, sample prefix
local fence = redis.call('GET', KEYS[1])
if fence and tonumber(fence) > tonumber(ARGV[1]) then return redis.error_reply('FENCED ' .. fence) end
redis.call('SET', KEYS[1], ARGV[1])  -- a server that was put back has an older one
local attempt = redis.call('HGET', KEYS[3], 'attempt')
if attempt and tonumber(attempt) >= tonumber(ARGV[3]) then return 0 end
if attempt then
  -- samples of the last attempt that are complete are kept; only the missing ones are made again
  for i = 0, tonumber(ARGV[6]) - 1 do
    local old = ARGV[7] .. attempt .. ':' .. i
    if redis.call('EXISTS', old) == 1 then redis.call('RENAME', old, ARGV[7] .. ARGV[3] .. ':' .. i) end
  end
end
redis.call('HSET', KEYS[3], 'state', 'dispatched', 'attempt', ARGV[3], 'least', ARGV[4], 'prompt', ARGV[5])
redis.call('SADD', KEYS[2], ARGV[2])
redis.call('XADD', KEYS[4], '*', 'r', ARGV[5], 'g', ARGV[2])
return 1
