#!lua flags=allow-oom
-- Give a claim back: the same record goes to the end of its stream, for another worker.
-- KEYS: stream   ARGV: entry, consumer
local mine = redis.call('XPENDING', KEYS[1], 'workers', ARGV[1], ARGV[1], 1, ARGV[2])
if #mine == 0 then return 0 end
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])
if #entry > 0 then redis.call('XADD', KEYS[1], '*', unpack(entry[1][2])) end
redis.call('XACK', KEYS[1], 'workers', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
