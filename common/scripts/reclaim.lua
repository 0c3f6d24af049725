-- Take over entries of consumers whose lease has expired, never by idle time. Each comes with the
-- number of its deliveries, this one included.
-- KEYS: stream   ARGV: consumer, lease prefix, most
local taken, most = {}, tonumber(ARGV[3])
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], 'workers')) do
  local name, pending = info[2], info[4]
  if name ~= ARGV[1] and redis.call('EXISTS', ARGV[2] .. name) == 0 then
    if pending == 0 then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[1], 'workers', name)
    elseif #taken < most then
      for _, entry in ipairs(redis.call('XPENDING', KEYS[1], 'workers', '-', '+', most - #taken, name)) do
        for _, claimed in ipairs(redis.call('XCLAIM', KEYS[1], 'workers', ARGV[1], 0, entry[1])) do
          taken[#taken + 1] = {claimed[1], claimed[2], entry[4] + 1}
        end
      end
    end
  end
end
return taken
