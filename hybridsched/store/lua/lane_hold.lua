-- Keep a lane, or give it back, if the caller still has it.
--
-- KEYS[1]  lane-holder:{lane}  string: token of the holder (PX)
-- ARGV[1]  token of the caller     ARGV[2]  lease in ms; 0 gives the lane back
--
-- Returns 1, or 0 when another has the lane or nobody.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
if ARGV[2] == '0' then
  return redis.call('DEL', KEYS[1])
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
