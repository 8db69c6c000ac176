-- Take or renew the leadership of a pool's policy workers.
--
-- KEYS[1]  leader        string: token of the leader (PX)
-- KEYS[2]  leader-fence  integer: raised by every change of leader
-- ARGV[1]  owner: a name unique to the process
-- ARGV[2]  token the caller holds; '' when it holds none
-- ARGV[3]  lease in ms
--
-- Returns {1, token} when the caller leads, {0, token of the leader} when another does.
-- A token is "{fence}:{owner}": an earlier leader's token never becomes valid again.
local current = redis.call('GET', KEYS[1])
if current then
  if ARGV[2] ~= '' and current == ARGV[2] then
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
    return {1, current}
  end
  return {0, current}
end
local token = redis.call('INCR', KEYS[2]) .. ':' .. ARGV[1]
redis.call('SET', KEYS[1], token, 'PX', ARGV[3])
return {1, token}
