#!lua flags=allow-oom
-- The weights of a version went out: only who holds them claims from now on. Returns the groups
-- whose prompts nobody has claimed; they will start with this version or a newer one. An empty
-- version withdraws the published one: nobody claims until the next is out.
-- KEYS: fence, published, prompts   ARGV: fence, version
local fence = redis.call('GET', KEYS[1])
if fence and tonumber(fence) > tonumber(ARGV[1]) then return redis.error_reply('FENCED ' .. fence) end
redis.call('SET', KEYS[1], ARGV[1])
if ARGV[2] ~= '' then redis.call('SET', KEYS[2], ARGV[2]) else redis.call('DEL', KEYS[2]) end
local last = '0-0'
for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[3])) do
  for i = 1, #info, 2 do if info[i] == 'last-delivered-id' then last = info[i + 1] end end
end
local waiting = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[3], '(' .. last, '+')) do
  for i = 1, #entry[2], 2 do if entry[2][i] == 'g' then waiting[#waiting + 1] = entry[2][i + 1] end end
end
return waiting
