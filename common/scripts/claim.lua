-- Prompts for a generator, only while the policy version it holds is the published one. In one
-- script, so that no prompt starts with weights older than the learner believes.
-- KEYS: published, prompts   ARGV: version, consumer, count
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {} end
local reply = redis.call('XREADGROUP', 'GROUP', 'workers', ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[2], '>')
return reply and reply[1] and reply[1][2] or {}
