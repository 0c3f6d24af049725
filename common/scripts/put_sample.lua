-- Write a payload once, and only for the attempt that the group is at: late results of the
-- presumed dead leave nothing behind.   KEYS: group, sample   ARGV: attempt, payload
if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'NX')
return 1
