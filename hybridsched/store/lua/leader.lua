-- Take or renew the leadership of a pool's policy workers.
--
-- KEYS[1]  leader        string: token of the leader (PX)
-- KEYS[2]  leader-fence  integer: raised by every change of leader
-- ARGV[1]  owner: a name unique to the process
-- ARGV[2]  token the caller holds; '' when it holds none
-- ARGV[3]  lease in ms
--
-- Returns {1, token} when the caller leads, {0, token of the leader} when another does.
-- What stands in the leader's key without a life, or is no string, no policy worker has written: nobody would
-- ever renew or end it, and it is replaced. So is what has a life of more than a minute: lives end by the server's
-- wall clock, and one that was set back by hours under a leader that then died would keep the pool without one. A fence begins at the server's milliseconds, and one that is no count
-- anew: above every earlier one, also of a server that has lost its data, for hosts remember the last they heard.
-- A token is "{fence}:{owner}": an earlier leader's token never becomes valid again.
local current = redis.pcall('GET', KEYS[1])
local left = redis.call('PTTL', KEYS[1])
if type(current) == 'string' and left >= 0 and left <= math.max(60000, tonumber(ARGV[3])) then
  if ARGV[2] ~= '' and current == ARGV[2] then
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
    return {1, current}
  end
  return {0, current}
end
local fence = redis.pcall('INCR', KEYS[2])
if type(fence) ~= 'number' or fence == 1 then
  local now = redis.call('TIME')
  fence = string.format('%d%03d', now[1], math.floor(now[2] / 1000))
  redis.call('SET', KEYS[2], fence)
end
local token = fence .. ':' .. ARGV[1]
redis.call('SET', KEYS[1], token, 'PX', ARGV[3])
return {1, token}
