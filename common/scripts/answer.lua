#!lua flags=allow-oom
-- A member's answer in a weight round.   KEYS: round   ARGV: member, reply
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], 600)
return 1
