#!lua flags=allow-oom
-- Move a poison entry to the dead letters, with the reason.
-- KEYS: stream, dead   ARGV: entry, reason, stream name, record
redis.call('XADD', KEYS[2], 'MAXLEN', 1000, '*', 'stream', ARGV[3], 'reason', ARGV[2], 'r', ARGV[4])
redis.call('XACK', KEYS[1], 'workers', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
