-- Write a record of the modes' (the journal of the switch, what it took), if the caller leads the pool.
--
-- KEYS[1]  leader   string: token of the leader
-- KEYS[2]  what is written: string
-- ARGV[1]  token of the caller
-- ARGV[2]  JSON
--
-- Returns 1 when it was written, 0 when the caller does not lead: then it must not act either.
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[2], ARGV[2])
return 1
