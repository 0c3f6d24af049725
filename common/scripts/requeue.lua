-- Put a dead letter back on its stream, for another try; a group that has moved on ignores it.
-- KEYS: dead, stream   ARGV: letter
-- Returns 1: done; 0: there is no such letter; -1: its record was too long to keep.
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])
if #found == 0 then return 0 end
local entry, fields = {}, found[1][2]
for i = 1, #fields, 2 do
  if fields[i] == 'r' or fields[i] == 'g' then
    if fields[i] == 'r' and fields[i + 1] == '' then return -1 end
    entry[#entry + 1] = fields[i]
    entry[#entry + 1] = fields[i + 1]
  end
end
redis.call('XADD', KEYS[2], '*', unpack(entry))
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
