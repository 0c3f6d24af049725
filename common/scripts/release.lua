#!lua flags=allow-oom
-- Give a claim back: the same record goes to the end of its stream, for another worker.
-- KEYS: stream   ARGV: entry, consumer
local mine = redis.call('XPENDING', KEYS[1], 'workers', ARGV[1], ARGV[1], 1, ARGV[2])
if #mine == 0 then return 0 end
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])
if #found > 0 then
  local named = {r = '', g = ''}
  for i = 1, #found[1][2], 2 do named[found[1][2][i]] = found[1][2][i + 1] end
  redis.call('XADD', KEYS[1], '*', 'r', named.r, 'g', named.g)
end
redis.call('XACK', KEYS[1], 'workers', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
