#!lua flags=allow-oom
-- Prompts for a generator, only while the policy version it holds is the published one. In one
-- script, so that no prompt starts with weights older than the learner believes. That version is
-- noted as the group's least: a learner that starts again dates the group by it, and not by the
-- version at which its prompt was sent, which would cost it slots.
-- KEYS: published, prompts   ARGV: version, consumer, count, prefix of groups
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {} end
local reply = redis.call('XREADGROUP', 'GROUP', 'workers', ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[2], '>')
local entries = reply and reply[1] and reply[1][2] or {}
for _, entry in ipairs(entries) do
  for i = 1, #entry[2], 2 do
    local group = entry[2][i] == 'g' and ARGV[4] .. entry[2][i + 1]
    if group and redis.call('HGET', group, 'state') == 'dispatched' then
      redis.call('HSET', group, 'least', ARGV[1])
    end
  end
end
return entries
