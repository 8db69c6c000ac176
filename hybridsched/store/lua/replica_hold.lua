-- Take or renew a replica's name: one worker has it, for as long as it renews it.
--
-- KEYS 1 replica-holder:REPLICA
-- ARGV 1 who asks: JSON, unique to the process   2 life without renewal, ms
-- Returns {1, ''} when the caller has it, {0, who has it} when another does.

local current = redis.pcall('GET', KEYS[1])
if type(current) == 'string' and current ~= ARGV[1] then
  return {0, current}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, ''}
