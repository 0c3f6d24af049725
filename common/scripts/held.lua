-- What a consumer holds already: its pending entries, with the number of their deliveries.
-- KEYS: stream   ARGV: consumer
local held = {}
for _, info in ipairs(redis.call('XPENDING', KEYS[1], 'workers', '-', '+', 10000, ARGV[1])) do
  local found = redis.call('XRANGE', KEYS[1], info[1], info[1])
  if #found > 0 then held[#held + 1] = {found[1][1], found[1][2], info[4]} end
end
return held
