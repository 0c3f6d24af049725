#!lua flags=allow-oom
-- Forget a group whose fate is on the learner's disk. Frees memory, so it runs on a full server.
-- KEYS: fence, open, group, verdicts   ARGV: fence, id, verdict entry or '', samples, sample prefix
local fence = redis.call('GET', KEYS[1])
if fence and tonumber(fence) > tonumber(ARGV[1]) then return redis.error_reply('FENCED ' .. fence) end
local attempt = redis.call('HGET', KEYS[3], 'attempt')
if attempt then
  for i = 0, tonumber(ARGV[4]) - 1 do redis.call('UNLINK', ARGV[5] .. attempt .. ':' .. i) end
end
redis.call('UNLINK', KEYS[3])
redis.call('SREM', KEYS[2], ARGV[2])
if ARGV[3] ~= '' then
  redis.call('XACK', KEYS[4], 'workers', ARGV[3])
  redis.call('XDEL', KEYS[4], ARGV[3])
end
return 1
