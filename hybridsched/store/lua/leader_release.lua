-- Give leadership up, if the caller still has it.
--
-- KEYS[1]  leader  string: token of the leader
-- ARGV[1]  token of the caller
--
-- Returns 1 when released, 0 when another leads or nobody.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
