#!lua flags=allow-oom
-- Hold a lease, also on a full server: who has none is dead to all others, and only the living can
-- empty it.   KEYS: lease   ARGV: value, milliseconds
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
