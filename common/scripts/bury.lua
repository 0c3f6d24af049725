#!lua flags=allow-oom
-- Move an entry that cannot be worked on to the dead letters, with the reason, its group, and its
-- record unless that is too long to keep; whatever other fields it has are left behind. If its
-- group still waits for it, the group goes on as failed.
-- KEYS: stream, dead, group, the stream for its failure
-- ARGV: entry, consumer, stream name, reason, state expected, attempt, state next, failure, group
-- Returns 1: done; 0: it was done before, or the entry is another consumer's by now.
local KEEP = 1048576
local mine = redis.call('XPENDING', KEYS[1], 'workers', ARGV[1], ARGV[1], 1, ARGV[2])
if #mine == 0 then return 0 end
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])
if #found > 0 then
  local letter = {'stream', ARGV[3], 'reason', ARGV[4]}
  if ARGV[6] ~= '' then
    letter[5], letter[6] = 'attempt', ARGV[6]
  end
  local fields = found[1][2]
  for i = 1, #fields, 2 do
    if (fields[i] == 'r' or fields[i] == 'g') and #letter < 10 then
      letter[#letter + 1] = fields[i]
      letter[#letter + 1] = #fields[i + 1] <= KEEP and fields[i + 1] or ''
    end
  end
  redis.call('XADD', KEYS[2], 'MAXLEN', 1000, '*', unpack(letter))
end
redis.call('XACK', KEYS[1], 'workers', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
local now = redis.call('HMGET', KEYS[3], 'state', 'attempt')
if ARGV[8] ~= '' and now[1] == ARGV[5] and now[2] == ARGV[6] then
  redis.call('HSET', KEYS[3], 'state', ARGV[7])
  redis.call('XADD', KEYS[4], '*', 'r', ARGV[8], 'g', ARGV[9])
end
return 1
