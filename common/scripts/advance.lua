#!lua flags=allow-oom
-- A worker's result and its acknowledgement in one step: compare-and-set on state and attempt.
-- It runs on a full server: only what is judged can be trained or lost, and so be freed.
-- KEYS: group, from, to
-- ARGV: entry, consumer, attempt, state expected, state next, record, group
-- Returns 1: done; 0: the group is elsewhere by now, the entry is gone; -1: not this consumer's entry.
local mine = redis.call('XPENDING', KEYS[2], 'workers', ARGV[1], ARGV[1], 1, ARGV[2])
if #mine == 0 then return -1 end
local now = redis.call('HMGET', KEYS[1], 'state', 'attempt')
local fits = now[1] == ARGV[4] and now[2] == ARGV[3]
if fits then
  redis.call('HSET', KEYS[1], 'state', ARGV[5])
  -- the ranks of the learner read it beside the payloads
  if ARGV[5] == 'judged' then redis.call('HSET', KEYS[1], 'verdict', ARGV[6]) end
  redis.call('XADD', KEYS[3], '*', 'r', ARGV[6], 'g', ARGV[7])
end
redis.call('XACK', KEYS[2], 'workers', ARGV[1])
redis.call('XDEL', KEYS[2], ARGV[1])
return fits and 1 or 0
