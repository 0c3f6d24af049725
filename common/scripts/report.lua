#!lua flags=allow-oom
-- A member's figures: never more wanted than on a full server.   KEYS: status   ARGV: member, figures
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
